"""Texts as the input of an estimator: encoders, their vectors, and the estimators for texts."""
