"""The local page where suspicious labels are confirmed or fixed, one key each."""

from importlib.util import find_spec

if not (find_spec("starlette") and find_spec("uvicorn")):
    raise ImportError('the review page needs an extra. Run pip install ".[review]" in the clone.')

from nearsay.review.server import review_run

__all__ = ["review_run"]
