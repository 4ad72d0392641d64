"""The pipeline of every source with random access: indices become examples, then batches.

    source.py ───> order.py ─────────> loader.py ─────────> augmenting.py
    examples in    shuffles an epoch,  reads them, in a     random
    any order      cuts it to batches  tf.data pipeline     changes

`settings.py` checks what all sources share, `damage.py` names what cannot be read, and `subsets.py`
takes parts.
"""
