"""The pipeline for sources with random access: indices become examples, then batches.

    source.py ───> order.py ─────────> loader.py ─────────> augmenting.py
    examples in    shuffles an epoch,  reads them, in a     random
    any order      cuts it to batches  tf.data pipeline     changes

`reading.py` joins these, `settings.py` checks the arguments that all sources share, `damage.py`
reports unreadable examples, and `subsets.py` selects parts.
"""
