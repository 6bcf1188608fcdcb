"""Training of LongSpark drafters: data, views of many anchors, the trainer, metrics. Not part of the remote code."""
