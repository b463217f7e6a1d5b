"""The measured engines. Each module is imported only by the worker process of its engine."""
