r"""Show the passages for one typed question.

python scripts/search.py "Which river flows through Aruba?" \
    checkpoint=runs/factbook/checkpoint index_dir=runs/factbook/index data=factbook
"""

import sys

from gc_dpr.cli import main

if __name__ == "__main__":
    main(["search", *sys.argv[1:]])
