"""From the bytes of an image file to pixels.

formats   each kind of image: its endings, magic, header and decoder
header    reads headers without decoding
decoder   size, colors, cropping
backends  what decodes each kind
"""
