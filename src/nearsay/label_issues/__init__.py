"""Which labels to distrust, and why, from whatever is known of a data set."""

from nearsay.label_issues.audit import audit
from nearsay.label_issues.result import Audit

__all__ = ["Audit", "audit"]
