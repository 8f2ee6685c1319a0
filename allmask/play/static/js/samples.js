// Texts to try, written for this page.

export const SAMPLES = {
  en: "The city council voted on Tuesday to close the old bridge for six months while workers repair its steel arches, which engineers say have rusted badly.",
  zh: "市气象局今天发布消息，受冷空气影响，本周末全市将有大到暴雨，局部地区气温下降十度，提醒市民减少外出。",
};

export const LONG = {
  en: "We study how a single pretrained encoder can be used for very different tasks when only its attention mask changes. With full attention it fills gaps in a text; with a mask from left to right it continues one; and when the source is read in both directions while the target is written token by token, it learns to write titles from a few thousand examples. No weight is added, and the mask alone decides which role the network plays. We measure the influence of every input on every output and find that it agrees with the mask exactly.",
  zh: "近日，某大学图书馆宣布将延长开放时间。从下周一起，阅览室每天早上七点开门，晚上十二点关门，考试周期间全天开放。馆方表示，此举是为了满足学生复习的需要，同时还将增加三百个座位和更多插座。许多学生表示欢迎，认为这样可以更好地安排学习时间。",
};
