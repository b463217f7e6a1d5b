"""What the services of AWS share: options, and the meaning of their answers."""
