// Texts to try, written for this page.

export const SAMPLES = {
  en: "A tool that checks the links of a web site. It follows every page, reports the addresses that are broken, and writes a summary as a table.",
  zh: "本文提出了一种基于深度学习的图像识别方法，用于自动检测农作物病害。实验结果表明，该方法在多个数据集上优于传统方法。",
};

export const LONG = {
  en: "This module parses the configuration file of the server and checks that every option has a valid value. Unknown options are reported with the line on which they stand. Values may refer to environment variables, which are replaced when the file is read, and several files can be merged: a later one wins.",
  zh: "近日，某大学图书馆宣布将延长开放时间。从下周一起，阅览室每天早上七点开门，晚上十二点关门，考试周期间全天开放。馆方表示，此举是为了满足学生复习的需要，同时还将增加三百个座位和更多插座。许多学生表示欢迎，认为这样可以更好地安排学习时间。",
};
