"""Which labels to distrust, and why, from whatever is known of a data set."""

from nearsay.auditing.judging import audit
from nearsay.auditing.result import Audit

__all__ = ["Audit", "audit"]
