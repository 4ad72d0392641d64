"""Sources of numbered items, such as a Hugging Face `Dataset` or shards of records.

items        the interface of items, and any object as one
item_source  makes examples from items, in several threads
shards       TFRecord and tar files, with an index stored beside each
shard        a TFRecord file; `checksums` has its checksum
"""
