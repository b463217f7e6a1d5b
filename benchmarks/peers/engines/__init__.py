"""The engines that are measured: each a module that nobody but its worker process imports."""
