"""Items by their number, such as a Hugging Face `Dataset` or shards of records offer, as a source.

`items.py` says what items have to offer, `item_source.py` makes examples of them in several
threads. `shards.py` finds the records in TFRecord and tar files through an index that is stored
beside them; `shard.py` knows the two formats, `checksums.py` TFRecord's checksum.
"""
