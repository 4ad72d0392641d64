"""Whatever `fit` takes becomes shares of batches.

what was passed ─────> batches ─────────────────> shares, on their devices ahead of the step
feed.py                sources.py                 cutter.py
                       epoch_source.py            ../shares.py
"""
