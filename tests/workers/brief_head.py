"""launch/pretrain.py on streams of which little is read before training, so that more lies ahead of it."""

from data.samples import splits
from launch import pretrain
from launch.console import ends

if __name__ == "__main__":
    splits.UNIGRAM_TOKENS = 500
    splits._HEAD_BATCH_CHARACTERS = splits._BATCH_CHARACTERS = splits._LEAST_BATCH = 500
    ends.run(pretrain.main)
