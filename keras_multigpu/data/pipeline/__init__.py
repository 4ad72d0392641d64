"""The pipeline of every source with random access: indices become examples, then batches.

    source.py ───> order.py ───> plan.py ────> loader.py ───> dataset.py ────> augmenting.py
    examples in    shuffles      cuts it       reads them     a tf.data        random
    any order      an epoch      into batches                 pipeline         changes

`settings.py` checks what all sources share, `damage.py` names what cannot be read, and `subsets.py`
takes parts.
"""
