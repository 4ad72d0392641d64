"""Whatever `fit` takes becomes shares of batches.

what was passed ─────> batches ─────────────────> shares, ahead of the step
feed.py                dataset_source.py          batch_source.py
epoch_source.py            ../shares.py
"""
