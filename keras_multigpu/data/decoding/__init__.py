"""From the bytes of an image file to pixels.

header    size and kind, without decoding
decoder   size, colors, cropping
backends  what decodes each kind
"""
