"""``python -m gc_dpr COMMAND …``; torchrun uses it as ``torchrun … -m gc_dpr COMMAND …``."""

from gc_dpr.cli import main

if __name__ == "__main__":
    main()
