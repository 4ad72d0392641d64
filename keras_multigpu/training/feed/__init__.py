"""Whatever `fit` takes becomes shares of batches.

what was passed ─────> batches ─────────────────> shares, on their devices ahead of the step
feed.py                batch_source.py            cutter.py
                       dataset_source.py          ../shares.py
                       epoch_source.py
"""
