"""`python -m twostroke.cli` is `twostroke`."""

from twostroke.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
