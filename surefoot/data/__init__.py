"""From a data file to batches of tokens.

`datasets` reads files row by row, `rows` checks each row and `pairs` each row of preferences, `chat` renders chats and
finds what is trained in them, `encode` makes token ids and loss masks, `workers` does so in other processes, `prepare`
puts it all together into a `Dataset`, `cursor` walks over it and `source` hands out its batches. Nothing is imported
here, so that a worker process starts without torch.
"""
