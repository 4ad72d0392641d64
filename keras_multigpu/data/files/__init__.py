"""Image files: where they are, and which labels and masks belong to them.

image_folder, scanning   folders of classes
lists, labelling         lists, CSV files, tables
image_files              the files, with their classes or numbers, as a source
masks                    an image for each image
"""
