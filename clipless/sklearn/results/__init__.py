"""What a fitted estimator says: decisions, scores on private rows, explanations, figures."""
