"""What every room shares: checks of arguments, lazy names, damaged files, the place of releases."""
