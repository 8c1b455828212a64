"""Tables larger than memory: read in pieces, and kept on the disk while they are trained on."""
