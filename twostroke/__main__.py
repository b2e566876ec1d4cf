"""`python -m twostroke` is the `twostroke` command."""

from twostroke.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
