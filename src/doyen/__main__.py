"""The entry point of the command line, also as `python -m doyen`."""

import signal


def main() -> int:
    """Import the command line and run it. Ctrl-C during the imports ends the process without a
    traceback."""
    at_first = signal.getsignal(signal.SIGINT)
    if at_first is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from doyen import cli

    signal.signal(signal.SIGINT, at_first)
    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
