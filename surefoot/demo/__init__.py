"""`surefoot demo`: a model learns past its teachers in front of you, while one of two runs is killed. Start reading at
`story.py`."""
