"""gc_dpr: dense passage retrieval training with a gradient cache, from raw files to top-k accuracy.

Importing the package loads nothing heavy; import the part you need, for example
``from gc_dpr.grad_cache import GradCache`` or ``from gc_dpr.models import BiEncoder``.
"""

__version__ = "0.1.0"
