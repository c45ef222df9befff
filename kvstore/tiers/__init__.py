"""What lies before the pool: pages in host memory, and pages on their way to it."""
