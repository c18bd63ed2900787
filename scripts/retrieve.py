r"""Retrieve the best passages for every question of a file.

python scripts/retrieve.py checkpoint=runs/factbook/checkpoint index_dir=runs/factbook/index \
    data=factbook output_dir=runs/factbook/run
"""

import sys

from gc_dpr.cli import main

if __name__ == "__main__":
    main(["retrieve", *sys.argv[1:]])
