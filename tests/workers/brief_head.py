"""launch/pretrain.py on streams of which little is read before training, so that more lies ahead of it."""

from data.samples import streamed_splits
from launch import pretrain
from launch.console import ends

if __name__ == "__main__":
    streamed_splits.UNIGRAM_TOKENS = 500
    streamed_splits._HEAD_BATCH_CHARACTERS = 500
    streamed_splits._BATCH_CHARACTERS = 500
    streamed_splits._LEAST_BATCH = 500
    ends.run(pretrain.main)
