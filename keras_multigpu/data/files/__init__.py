"""Image files: where they are, and which labels and masks belong to them.

image_folder, scanning   folders of classes        lists, labelling   lists, CSV files, tables
targets                  classes as numbers        masks              an image for each image
image_files              the files as a source     file_table         many paths, little memory
"""
