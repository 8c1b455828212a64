"""Membership inference: attacks that tell training examples from others."""
