"""What selecting the best of several private runs costs."""
