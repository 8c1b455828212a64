"""`python -m clipless` is the command line."""

from clipless.cli import main

if __name__ == "__main__":
    main()
