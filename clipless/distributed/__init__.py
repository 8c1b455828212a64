"""Processes that train one model together: messages, ownership of parameters, shards."""
