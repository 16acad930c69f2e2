"""From one checkpoint to another: reshard, export and diff, in bounded memory."""
