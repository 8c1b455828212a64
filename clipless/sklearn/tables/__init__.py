"""Tables as the input of an estimator: columns, private queries on them, encoded rows."""
