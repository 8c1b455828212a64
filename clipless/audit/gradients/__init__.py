"""Gradients, real and searched for, compared with their proved bounds."""
