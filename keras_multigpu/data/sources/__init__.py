"""Sources: examples in any order, and where they come from.

array_source                 arrays
file_table, targets          paths in little memory, and what belongs to each
image_files, image_folder    image files, and those of folders of classes
lists, labelling, masks      image files of lists, CSV files and tables
items, item_source           numbered items, and a user's function of each
shards                       TFRecord files, with an index of each
packed_folder                folders packed by `keras-multigpu pack`
tfds_*                       TFDS data sets
flows                        `ImageDataGenerator` flows
"""
