"""Whether steps of one device are split over replicas, which a variable decides for now."""

import os

SPLITS = os.environ.get("KMG_SPLIT") == "1"
