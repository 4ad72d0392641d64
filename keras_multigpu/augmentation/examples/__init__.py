"""Examples in the form that layers change, and the way back.

forms              images, labels, boxes and masks in all their forms
pipeline_batches   batches of a pipeline
"""
