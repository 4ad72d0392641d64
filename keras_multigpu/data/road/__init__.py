"""The main road: indices become examples, examples become batches.

    source.py ───> order.py ───> plan.py ────> loader.py ───> pipeline.py ───> augmenting.py
    examples in    which one     which ones    reads them     a tf.data        random
    any order      stands where  make a batch                 pipeline         changes

`settings.py` checks what all sources share, `damage.py` names what cannot be read, and `subsets.py`
takes parts.
"""
