"""What comes into a layer, and the way back.

forms     images, labels, boxes and masks in all their forms
batches   those of a pipeline
"""
