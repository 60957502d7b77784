"""`python -m doyen`: the command line of the environment whose Python this is."""

from doyen.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
