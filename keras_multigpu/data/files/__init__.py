"""Image files: where they are, and which labels and masks belong to them.

folder, scanning    folders of classes        lists, table, labelling   lists of files
targets             classes as numbers        masks                     an image for each image
images              the files as a source
"""
