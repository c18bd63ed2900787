"""Compare the gradients of the cached step with those of the undivided batch.

python scripts/check_gradients.py experiment=factbook_cpu output_dir=runs/check
"""

import sys

from gc_dpr.cli import main

if __name__ == "__main__":
    main(["check_gradients", *sys.argv[1:]])
