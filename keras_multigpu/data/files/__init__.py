"""Image files: where they are, and which labels and masks belong to them.

folder, scanning    folders of classes            lists, labelling   lists, CSV files and tables
targets             classes as numbers            masks              an image for each image
images              the files as a source         file_table         many paths in little memory
"""
