# In the manner of distillation tutorials: a teacher is trained, then judged, then taught from in eval mode.
import torch
import torch.nn as nn
import torch.nn.functional as F
from peer_data import Numbered, points, save
from torch.utils.data import DataLoader

torch.manual_seed(42)
teacher = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))
student = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
train_loader = DataLoader(Numbered(points(44, 1), True), batch_size=10, shuffle=True)
test_loader = DataLoader(Numbered(points(20, 2), False), batch_size=10, shuffle=False)
steps = 0


def train(model, epochs, learning_rate):
    global steps
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    model.train()
    for epoch in range(epochs):
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            steps += 1


def test(model):
    model.eval()
    with torch.no_grad():
        return sum(F.cross_entropy(model(x), y, reduction="sum").item() for x, y in test_loader) / 20


def distill(teacher, student, epochs, T, soft_weight):
    global steps
    optimizer = torch.optim.SGD(student.parameters(), lr=0.2)
    teacher.eval()
    student.train()
    for epoch in range(epochs):
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = student(inputs)
            soft_targets = F.softmax(teacher_logits / T, dim=-1)
            soft_prob = F.log_softmax(student_logits / T, dim=-1)
            soft = torch.sum(soft_targets * (soft_targets.log() - soft_prob)) / soft_prob.size()[0] * (T**2)
            hint = F.kl_div(soft_prob, soft_targets, reduction="batchmean")
            loss = soft_weight * (soft + hint) + (1 - soft_weight) * F.cross_entropy(student_logits, labels)
            loss.backward()
            optimizer.step()
            steps += 1


train(teacher, 2, 0.3)
losses = [test(teacher)]
distill(teacher, student, 2, 2.0, 0.25)
losses.append(test(student))
save(nn.ModuleList([teacher, student]), steps, losses)
