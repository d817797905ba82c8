"""What ranks put on record while they train: metrics and the ledger of samples.

Records are JSON lines in a storage, written in parts by one rank each, read by anyone, without
torch.
"""
