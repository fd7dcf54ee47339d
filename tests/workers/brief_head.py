"""launch/pretrain.py on streams of which little is read before training, so that more lies ahead of it."""

from data.samples.splits import streamed
from launch import pretrain
from launch.console import ends

if __name__ == "__main__":
    streamed.UNIGRAM_TOKENS = 500
    streamed._HEAD_BATCH_CHARACTERS = streamed._BATCH_CHARACTERS = streamed._LEAST_BATCH = 500
    ends.run(pretrain.main)
